"""Files through the page cache and around it, kernel transfers without a thread, and directory locks."""
