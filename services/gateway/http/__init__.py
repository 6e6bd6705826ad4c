"""The gateway's HTTP front: OpenAI's API as a thin translation of `services.gateway.generation`."""
