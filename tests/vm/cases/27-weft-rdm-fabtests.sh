# guest: large
# needs: weft fabtests
# seconds: 1200
# libfabric's fabtests of endpoints with many peers on rxe0. fi_cq_test opens 32,768 queues, which
# take more than 6 GB of the kernel's memory with MSG endpoints; it gets the same limit here. Tests
# that repeat others with more iterations run on soft0 only.
run() {
	fabtests rdm '^(?!.*pingpong( -v)?$|.*_bw -v$)' --more '^fi_cq_test=-L 1024'
}
