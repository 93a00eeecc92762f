"""Text: frozen types as JSON, tables, and numbers with their units."""
