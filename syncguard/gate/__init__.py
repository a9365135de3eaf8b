"""The trainer's handle on a fleet of workers: publish a manifest, wait, and act on one verdict per worker."""
