"""The first program of the README: one prompt twice through a service of two ranks; the second time it is cached."""

import numpy as np

import hicache_ray
from hicache_ray.rank.step import Admit, Finish

options = {"tp_size": 2, "page_size": 16, "layers": 4, "heads": 4, "head_dim": 32, "l1_tokens": 4096}
config = hicache_ray.HiCacheConfig(hicache_storage_backend="ray", host_memory_reserve=1.0, **options)
prompt = np.arange(1000, dtype=np.uint32)
with hicache_ray.start(config) as service:
    group = service.group("instance-0")
    for rid in ("first", "second"):
        group.step(admits=[Admit(rid, prompt.tobytes())])  # looked up; what L3 has is on its way
        while not group.step(polls=[rid]).polled[0].ready:
            pass
        row = group.step(schedules=[rid]).scheduled[0]  # locked, loaded, room for the rest: now the model runs
        print(f"{rid}: {row.device_tokens} tokens in L1, {row.computed_tokens} to compute")
        group.step(finishes=[Finish(rid)])  # its KV enters the tree, and goes on to L2 and L3
