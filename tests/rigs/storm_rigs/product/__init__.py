"""The product as documents and clients name it: its public names, its console output."""
