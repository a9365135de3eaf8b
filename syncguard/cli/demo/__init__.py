"""The demo: a real trainer, a worker, faulty pushes on purpose, and what the gate says of each."""
