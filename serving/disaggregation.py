"""Prefill and decode on replicas of their own, and LMCache, which carries the KV from one to the other.

A long prompt is sent to the prefill replicas first, with room for one token; `prefill.Prefill` does
that inside the replica that answers, which then finds the KV where they left it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.serving.process import Child, free_port
from strop.serving.stack import Disaggregation

CHUNK_TOKENS = 128
"""Unit of what LMCache carries; a multiple of the block sizes that are usual on CPUs and on GPUs."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a replica has to know to take part."""

    role: Literal["prefill", "decode"]
    prefill_url: str
    """A router of the prefill replicas."""
    lmcache_port: int | None

    def kv_transfer_config(self) -> dict[str, Any]:
        """vLLM's `--kv-transfer-config`.

        KV that cannot be loaded is computed. A replica that answers stores nothing: what it decodes is
        in its own cache.
        """
        if self.lmcache_port is None:
            return {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
            }
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both" if self.role == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.lmcache_port,
                # By default a request waits five minutes for a server that has died. A server that is
                # back has forgotten its clients; they say who they are again if they noticed that it
                # was gone, so they have to look more often than it takes to start.
                "lmcache.mp.mq_timeout": 10.0,
                "lmcache.mp.heartbeat_interval": 2.0,
            },
        }


@dataclass(slots=True)
class LMCacheServer:
    """An LMCache server on this machine; it is started again when it dies, and has then forgotten everything."""

    port: int
    http_port: int
    child: Child

    @classmethod
    def start(
        cls,
        name: str,
        log: Path,
        how: Disaggregation,
        device: str,
        orphan_s: float,
        ports: tuple[int, int] | None = None,
    ) -> "LMCacheServer":
        """Start it on its `ports` (of requests, of HTTP) and wait until it answers. Raises ProcessError."""
        port, http_port = ports or (free_port(), free_port())
        child = Child.start(
            name,
            [
                sys.executable, "-m", "lmcache.cli.main", "server",
                "--host", "127.0.0.1", "--port", str(port),
                "--http-host", "127.0.0.1", "--http-port", str(http_port),
                "--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU",
                "--l1-size-gb", str(how.buffer_gib),
                "--supported-transfer-mode", "engine_driven" if device == "cpu" else "lmcache_driven",
            ],
            log,
            grace_s=10,
            restart=True,
            orphan_s=orphan_s,
        )  # fmt: skip
        server = cls(port, http_port, child)
        child.wait_until_answers(f"http://127.0.0.1:{http_port}/healthcheck", 120)
        return server

    def to_dict(self) -> dict[str, Any]:
        """What `adopt` needs in another process."""
        return {"ports": [self.port, self.http_port], "folder": str(self.child.folder)}

    @classmethod
    def adopt(cls, name: str, log: Path, known: dict[str, Any]) -> "LMCacheServer | None":
        """Take over a server whose owner is gone; None if it is gone too."""
        child = Child.adopt(name, log, Path(known["folder"]))
        port, http_port = known["ports"]
        return cls(port, http_port, child) if child else None
