"""What a request consists of between the network and its handler."""
