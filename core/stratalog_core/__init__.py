"""Shared by every Stratalog component: errors, record batches, framing, RPC, files, ports and configuration.

Imports no other component. ``batches/``, ``connections/``, ``errors`` and ``quorum`` do no I/O; ``rpc/``, ``files/``
and ``system`` touch the machine.
"""
