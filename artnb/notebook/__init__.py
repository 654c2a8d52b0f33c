"""What a notebook needs: the event-loop helper and progress."""
