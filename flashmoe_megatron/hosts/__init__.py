"""Expert parallelism beyond one host, in two levels: rails between hosts, a backend within each."""
