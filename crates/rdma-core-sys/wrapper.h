/* What `make bindings` reads: the public headers of rdma-core. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
