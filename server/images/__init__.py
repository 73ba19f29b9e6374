"""Images of requests, from the client's encoding to decoded images."""
