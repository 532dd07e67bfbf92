"""Shared by every Stratalog component: ids, errors, record batches, framing, RPC, files, ports and configuration.

Imports no other component. ``batches/``, ``connections/``, ``ids``, ``errors`` and ``quorum`` do no I/O; ``rpc/``, ``files/``
and ``system`` touch the machine.
"""
