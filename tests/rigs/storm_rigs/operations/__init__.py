"""Operations on a cluster at the level of records, and what interrupts them."""
