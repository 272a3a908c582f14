"""What keeps a long job on many hosts alive."""
