"""The degrees of the scheduled backend: a model of its streams, and what this machine takes."""
