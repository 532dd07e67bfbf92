"""Consumer groups: ``core/`` decides; the modules beside it are its shell over ``__consumer_offsets``."""
