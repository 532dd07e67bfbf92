"""Transactions: ``core/`` decides; the modules beside it are its shell over ``__transaction_state`` and the other brokers."""
