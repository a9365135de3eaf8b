"""Generated protobuf and gRPC code; made by scripts/gen-protos, never edited."""
