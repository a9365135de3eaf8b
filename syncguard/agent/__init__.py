"""The side-car of one rollout worker: decides whether it may serve, and trusts no label."""
