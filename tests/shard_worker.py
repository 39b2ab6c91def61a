"""A process with a store open that obeys its standard input, with one line per answer.

python shard_worker.py DIR MODE CONFIG
put N SEED · get N SEED · hold N SEED · read · free · evict BYTES · stat NAME · check
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from conftest import SMALL, kv_of, prompt, put_prompt

import impress

GEOMETRY = impress.Geometry(2, 4, 2, 128, "float32")


class Worker:
    def __init__(self, store: impress.PrefixStore) -> None:
        self.store = store
        self.held: Any = None

    def put(self, n: str, seed: str) -> bool:
        return put_prompt(self.store, prompt(int(n), int(seed)), wait_s=30).wait(30)

    def lookup(self, n: str, seed: str) -> int:
        return self.store.lookup(prompt(int(n), int(seed)))

    def get(self, n: str, seed: str) -> Any:
        """Number of tokens read right, or "lost", or "wrong"."""
        self.hold(n, seed)
        n_tokens, answer = self.held[1].n_tokens, self.read() if self.held[2] else "right"
        self.free()
        return n_tokens if answer == "right" else answer

    def hold(self, n: str, seed: str) -> int:
        tokens = prompt(int(n), int(seed))
        lease = self.store.lease(tokens)
        self.held = tokens, lease, lease.session() if lease.n_tokens else None
        return lease.n_tokens

    def read(self) -> str:
        tokens, lease, session = self.held
        keys, values = kv_of(tokens, GEOMETRY)
        try:
            for layer in range(GEOMETRY.n_layers):
                k, v, _ = session.retrieve(layer, None)
                for got, want in ((k, keys[layer]), (v, values[layer])):
                    if not np.array_equal(got.numpy(), want[:, : lease.n_tokens]):
                        return "wrong"
        except impress.PrefixLost as lost:
            return f"lost {lost.reason}"
        return "right"

    def free(self) -> bool:
        _, lease, session = self.held
        if session is not None:
            session.close()
        lease.release()
        return True

    def evict(self, n_bytes: str) -> int:
        return self.store.evict(int(n_bytes))

    def stat(self, name: str) -> Any:
        return self.store.stats()[name]

    def check(self) -> bool:
        self.store.flush()
        self.store.check()
        return True


def main() -> None:
    folder, mode, config = sys.argv[1:4]
    settings = impress.Config(**{**SMALL, **json.loads(config)})
    with impress.PrefixStore.open(folder, GEOMETRY, "test", settings, mode) as store:
        worker = Worker(store)
        print(json.dumps("open"), flush=True)
        for line in sys.stdin:
            name, *rest = line.split()
            print(json.dumps(getattr(worker, name)(*rest)), flush=True)


if __name__ == "__main__":
    main()
