"""The layer in plain torch: a backend for any device, and the oracle that judges both backends."""
