"""The bookie process: start, registration, request dispatch and background tasks."""
