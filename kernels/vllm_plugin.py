"""Loads a Stack's kernels into vLLM, by its plugin entry point `vllm.general_plugins`.

Nothing happens unless STROP_KERNELS names a manifest (`kernels.json`). If its kernels cannot be loaded,
the engine serves with its own, and the log says so.
"""

import logging
import os
from dataclasses import asdict
from pathlib import Path

from strop.kernels.bundle import LibraryError, activation, load_library

VARIABLE = "STROP_KERNELS"

# A child of vLLM's logger, so that its handlers print these lines among vLLM's own.
logger = logging.getLogger("vllm.strop.kernels")


def register() -> None:
    """Entry point; loaded in every process of a replica, several times over."""
    manifest = os.environ.get(VARIABLE)
    if not manifest:
        return
    try:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            logger.warning("Kernels of strop not loaded: %s holds kernels for CPUs.", manifest)
            return
        load_library(Path(manifest))
        from strop.kernels import vllm_linear

        vllm_linear.install()
    except (LibraryError, ImportError, AttributeError) as error:
        logger.error("Kernels of strop not loaded, vLLM serves with its own: %s", error)
        return
    for one in activation():
        logger.info("Kernels of strop loaded: %s is %s", one.name, (one.sha256 or "none")[:16])


class WorkerExtension:
    """For `--worker-extension-cls`: lets `collective_rpc` ask a worker what it runs."""

    def strop_kernels(self) -> list[dict[str, object]]:
        """`Activation` of every operator in this worker's process."""
        return [asdict(one) for one in activation()]
