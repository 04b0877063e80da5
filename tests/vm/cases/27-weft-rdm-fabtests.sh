# guest: large
# needs: weft fabtests
# seconds: 1200
# long: 58 tests; otherwise one of each kind, because the library's part of the others runs on soft0
# libfabric's fabtests of endpoints with many peers on rxe0. fi_cq_test opens 32,768 queues, which
# take more than 6 GB of the kernel's memory with MSG endpoints; it gets the same limit here. Tests
# of RMA and atomics register 64 buffers of 8 MiB each way in one region, for whose page list rxe
# allocates more than 4 MiB at once (ENOMEM; 20-weft-fabtests.sh): they get a smaller window or
# size. Tests that repeat others with more iterations, or have more processes than the guest has
# processors, run on soft0 only, unless WEFT_VM_ALL is set.
run() {
	only='^(fi_(getinfo_test|av_test|cq_test|rdm$|av_xfer|cq_data|rdm_tagged_peek|unexpected_msg)'
	only="$only|fi_inject_test -A inject|fi_flood -e rdm -v -T 1$|fi_resmgmt_test -e rdm -t -j -A"
	only="$only|fi_rdm_multi_client -C 10 -I 5$|fi_multi_recv|fi_rdm_tagged_(pingpong|bw) -I 5 -v$"
	only="$only|fi_rma_bw -e rdm -I 20 -o (write|read|writedata) -v|fi_rma_pingpong -e rdm -I 5"
	only="$only|fi_cq_data -e rdm -o writedata|fi_multi_mr|fi_rdm_rma_event|fi_rdm_atomic -I 3 -o all -v)"
	[ -n "$WEFT_VM_LONG" ] && only='^(?!.*pingpong( -v)?$|.*_bw -v$|fi_(multinode|rdm_stress|ubertest))'
	limit=120
	[ -n "$WEFT_VM_ALL" ] && only='.' limit=1800
	fabtests rdm "$only" --long --seconds $limit --more '^fi_cq_test=-L 1024' --more 'multi_ep=-S 256' --more 'rma_bw|rma_pingpong=-W 8' --more 'rdm_atomic=-S 64'
}
