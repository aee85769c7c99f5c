"""Components of topologies that several tests run in this process.

A spec names a class by the module that defines it, which a worker process imports from the
topology's archive. These modules are in no archive: a test that starts worker processes ships its
components as source text.
"""

from storm_rigs.components.bolts import (
    AsyncHoldBolt,
    BlockingSleepBolt,
    CollectBolt,
    CountBolt,
    DiscardBolt,
    HoldBolt,
    RejectBolt,
    SleepBolt,
)
from storm_rigs.components.spouts import (
    InputSpout,
    Numbers,
    QueueSpout,
    RangeSpout,
    Sentences,
    Words,
)

__all__ = [
    "AsyncHoldBolt",
    "BlockingSleepBolt",
    "CollectBolt",
    "CountBolt",
    "DiscardBolt",
    "HoldBolt",
    "InputSpout",
    "Numbers",
    "QueueSpout",
    "RangeSpout",
    "RejectBolt",
    "Sentences",
    "SleepBolt",
    "Words",
]
