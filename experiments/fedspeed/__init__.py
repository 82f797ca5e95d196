"""Studies of FedSpeed (ICLR 2023, and the thesis of 2023)."""
