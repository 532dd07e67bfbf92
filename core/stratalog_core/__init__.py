"""What every Stratalog component shares: ids, errors, record batches, framing, RPC, ports and configuration.

Nothing in here imports another component. Modules without ``rpc`` or ``system`` in their name do no I/O.
"""
