"""The cluster: its file, devices, links and machines, and what was measured of them."""
