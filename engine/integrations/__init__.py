"""What others have written, run here unchanged."""
