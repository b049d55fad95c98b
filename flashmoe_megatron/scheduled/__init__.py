"""The scheduled backend: parts of the layer travel while others are computed."""
