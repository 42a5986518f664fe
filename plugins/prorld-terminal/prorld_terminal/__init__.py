"""Harbor and Terminal-Bench task folders."""
