"""This broker and its peers as the metadata quorum knows them: registration, addresses, replicas, load, producer ids."""
