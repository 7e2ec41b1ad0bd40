"""Bearer keys: which client is which tenant."""

import hashlib
import os
import re
from pathlib import Path

from strop.serving.traces import PROBE_TENANT

VARIABLE = "STROP_GATEWAY_KEYS"
MIN_KEY_CHARACTERS = 16
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class KeysError(ValueError):
    """Keys that cannot be used; the message names the line and never a key."""


def take_keys(file: str | None) -> dict[str, str]:
    """Tenants by the SHA-256 (lower-case hex) of their keys; empty where no keys are set.

    Keys come from the environment variable STROP_GATEWAY_KEYS, which is removed so that no child
    process inherits it, else from `file`. Both hold a line for each key: the tenant, a space, the
    key. A tenant may have several keys. Raises KeysError.
    """
    if (text := os.environ.pop(VARIABLE, None)) is not None:
        return _parse(text, VARIABLE)
    if file is None:
        return {}
    path = Path(file).expanduser()
    try:
        found = path.stat()
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise KeysError(f"The keys in {path} cannot be read: {reason}.") from None
    # A file of somebody else's (a mounted secret) is read through its group.
    if found.st_mode & (0o077 if found.st_uid == os.getuid() else 0o027):
        raise KeysError(
            f"Others than its owner may read {path}, which holds keys. Run `chmod 600 {path}`, "
            "and replace the keys if somebody may have seen them."
        )
    return _parse(text, str(path))


def _parse(text: str, source: str) -> dict[str, str]:
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = line.split()
        where = f"{source} line {number}"
        if len(parts) != 2:
            raise KeysError(f"{where} must be a tenant, a space and a key.")
        tenant, key = parts
        if not _TENANT.fullmatch(tenant) or tenant.lower() == PROBE_TENANT:
            raise KeysError(
                f"{where}: a tenant is 1 to 64 of A-Z a-z 0-9 . _ - and not {PROBE_TENANT!r}, which is strop's own."
            )
        if len(key) < MIN_KEY_CHARACTERS:
            raise KeysError(
                f"{where}: the key of {tenant!r} is shorter than {MIN_KEY_CHARACTERS} characters. "
                "`openssl rand -hex 32` makes one."
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
        if tenants.setdefault(digest, tenant) != tenant:
            raise KeysError(f"{where}: {tenants[digest]!r} has the same key as {tenant!r}.")
    if not tenants:
        raise KeysError(f"{source} holds no keys. Write a tenant, a space and a key on each line.")
    return tenants
