"""Hosts a TCPStore in a separate process, which tests stop; prints its port."""

import time

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
