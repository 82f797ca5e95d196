"""Studies of FedSWA and FedMoSWA (ICML 2025)."""
