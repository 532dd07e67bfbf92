"""Requests between the network and their handlers: context, handler declarations, access rules and response memory."""
