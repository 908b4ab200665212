"""What happens to requests when a rank dies in the middle of a step? Break a service of your own and look.

    python examples/faults_rank.py

The plan kills rank 1 the 30th time it enters the step's reduction, where rank 0 already waits for it.
"""

from __future__ import annotations

import numpy as np

import hicache_ray
from hicache_ray.config import HiCacheConfig
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.faults.service import FaultRunner, ServiceFaults
from hicache_ray.rank.group import GroupRestarted
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.testing.serving import ask

CONFIG = HiCacheConfig(
    model_name="example",
    layers=2,
    heads=2,
    head_dim=8,
    tp_size=2,
    page_size=4,
    l1_tokens=256,
    hicache_ratio=4.0,
    hicache_storage_backend="ray",
    storage_actors=2,
    storage_actor_size=0.02,
    prefetch_threshold=4,
    hicache_storage_prefetch_policy="wait_complete",
    host_memory_reserve=0.5,
    device="cpu",
    step_timeout=6.0,
    collective_timeout=3.0,
)
PLAN = FaultPlan.parse({"faults": [{"kind": "kill", "who": "rank 1", "point": "rank.reduce", "call": 30}]})


def main() -> None:
    prompts = [np.arange(40, dtype=np.uint32) + 100 * number for number in range(10)]
    with hicache_ray.start(CONFIG, name="faults-rank") as service:
        group = service.group(engine=ENGINE)  # verifies the bytes of every cached page it uses
        runner = FaultRunner(ServiceFaults(service, PLAN))
        runner.start()
        again = []
        for number, prompt in enumerate(prompts):
            try:
                ask(group, prompt, times=1)
            except GroupRestarted as restarted:  # what was in flight is gone: send it again
                print(restarted)
                again.append(number)
                ask(group, prompt)
        for firing in runner.faults.firings():
            print(f"{firing.kind} of {firing.who} at {firing.point}")
        runner.stop()
        settle(group)
        group.check_integrity()
        rows = [ask(group, prompt) for prompt in prompts]
        cached = sum(row.device_tokens + row.host_tokens + row.storage_tokens for row in rows)
        print(f"requests sent twice: {again}; generation {group.generation}; afterwards {cached} of 400 tokens cached")


if __name__ == "__main__":
    main()
