"""Studies of CFedAvg (MobiHoc 2021)."""
