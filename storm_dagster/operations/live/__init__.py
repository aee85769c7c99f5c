"""Operations on topologies that run: lifecycle, rebalance, healing, cleaning."""
