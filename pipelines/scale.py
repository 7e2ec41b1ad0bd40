"""Work on many files: in this process where there are few, on Ray Data where there are many."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from strop.serving.cluster import start_ray

FEW = 16
"""With so little to do, Ray would take longer to start than the work takes."""

Item = dict[str, int | str | bytes]
Rows = dict[str, np.ndarray]


def spread(
    work: Callable[[Item], Rows], items: list[Item], home: Path, address: str | None = None
) -> Iterator[Rows]:
    """What `work` returns for every item, in any order; columns of equal length, one entry a row.

    On Ray the results may be cut or joined. Machines of a cluster must see the same paths.
    """
    if len(items) <= FEW:
        yield from map(work, items)
        return
    import ray
    import ray.data

    started = not ray.is_initialized()
    if started:
        start_ray(home, address, background=True)
    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        done: Any = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            cast(Any, partial(_of_batch, work)), batch_size=1, batch_format="numpy"
        )
        yield from done.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=0)
    finally:
        if started:
            ray.shutdown()


def _of_batch(work: Callable[[Item], Rows], batch: dict[str, Any]) -> Rows:
    values = {name: column[0] for name, column in batch.items()}
    return work({name: v.item() if isinstance(v, np.generic) else v for name, v in values.items()})
