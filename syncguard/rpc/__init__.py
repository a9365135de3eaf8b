"""What both ends of a `syncguard.v1` connection share: credentials, errors and bounded streams.

agent and gate never import each other; they meet in the protos and in this room.
"""
