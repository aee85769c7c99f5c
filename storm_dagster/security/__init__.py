"""Identity and permission: signatures, tokens, TLS, peers, exposure."""
