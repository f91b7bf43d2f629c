"""More than one host: workers on a Ray cluster, runs in object storage, and what a run costs on stated hardware."""
