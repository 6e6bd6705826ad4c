"""What more than one service needs. Imports nothing of the services, and never torch."""
