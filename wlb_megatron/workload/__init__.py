"""What a document costs: work units, measured tables, memory."""
