"""In a container of the cluster: the words that the word count has saved, against a count of its
own, as one JSON line.

counts.py NAME FILES LIMIT
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

from storm_dagster.testing.task_state import read_task_states

STATE = Path("/var/lib/storm_state")
sys.path.insert(0, "/topologies")
wordcount = importlib.import_module("wordcount")

name, files, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
done = total = 0
for state in read_task_states(STATE, name, "lines").values():
    done, total = done + state.get("done", 0), total + state.get("total", 0)
counted: Counter[str] = Counter()
twice = []
for state in read_task_states(STATE, name, "count").values():
    for word, times in state.items():
        if word in counted:
            twice.append(word)
        counted[word] += times
expected: Counter[str] = Counter()
for _, line in wordcount.read_lines(files, limit):
    expected.update(wordcount.words_of(line))
wrong = sorted(word for word in counted | expected if counted[word] != expected[word])
report = {"done": done, "total": total, "words": counted.total(), "expected": expected.total()}
print(
    json.dumps({**report, "wrong": len(wrong), "twice": len(twice), "first_wrong": wrong[:5]}),
    flush=True,
)
