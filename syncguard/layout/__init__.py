"""Every resident form back to logical tensors: which elements of which exported tensor a rank's memory must equal."""
