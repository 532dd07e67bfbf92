"""Configuration of a broker and its topics: settings, config names with their bounds, listeners, memory shares."""
