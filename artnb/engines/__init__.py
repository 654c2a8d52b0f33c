"""What generates tokens. Engines know token ids, never text; each module is imported only when used."""
