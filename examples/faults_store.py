"""Is a service right, and only slower, when its store misbehaves? A plan from a file, on a service found by its name.

    python examples/faults_store.py

Here the service is started first; on your own deployment leave that out and connect to what runs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from faults_rank import CONFIG

import hicache_ray
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.faults.service import FaultRunner, ServiceFaults
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.testing.serving import ask

PLAN = """
seed: 5
faults:
  - {kind: corrupt, who: storage *, times: 0, probability: 0.2}                       # flips bytes in the arenas
  - {kind: drop, who: storage *, point: actor.acquire, times: 0, probability: 0.2}    # loses answers to readers
  - {kind: stale_exists, who: rank *, times: 0, probability: 0.5}                     # says yes to what it has not
  - {kind: partition, who: rank 0, peer: "*storage-1", call: 20, seconds: 0.5}        # rank 0 can't reach one actor
  - {kind: kill, who: storage 0, time: 1}
"""


def main() -> None:
    prompts = [np.arange(40, dtype=np.uint32) + 100 * number for number in range(40)]
    with tempfile.TemporaryDirectory() as folder, hicache_ray.start(CONFIG, name="faults-store") as started:
        started.group(engine=ENGINE)
        file = Path(folder) / "plan.yaml"
        file.write_text(PLAN)
        service = hicache_ray.connect("faults-store")  # from any process of the cluster
        group = service.group()
        runner = FaultRunner(ServiceFaults(service, FaultPlan.load(file)))
        runner.start()
        for _ in range(3):
            for prompt in prompts:
                ask(group, prompt)  # raises WrongBytes if a cached page were not what it must be
        kinds = sorted({firing.kind for firing in runner.faults.firings()})
        runner.stop()
        for _ in range(2):  # whatever still lies damaged in L3 is found out when it is read, and stored again
            settle(group)
            group.flush()
            for prompt in prompts:
                ask(group, prompt)
        settle(group)
        group.check_integrity()  # every page of L1 and L2 has one owner
        assert service.storage is not None
        print(f"faults: {', '.join(kinds)}; generation {group.generation}: the group was not rebuilt")
        print(f"what is wrong in the store afterwards: {sorted(filter(None, audit(service)))}")


def audit(service: hicache_ray.Service) -> list[str]:
    """What is wrong with each storage actor, "" when nothing is. Every stored page is compared with its checksum."""
    assert service.storage is not None
    return [text if text is not None else "away" for text in service.storage.audit(read_pages=True).values()]


if __name__ == "__main__":
    main()
