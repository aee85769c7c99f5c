"""Components of a topology without a cluster around them."""
