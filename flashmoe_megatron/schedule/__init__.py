"""What a machine takes: measurements from which degrees are computed."""
