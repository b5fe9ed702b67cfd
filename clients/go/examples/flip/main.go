// SPDX-License-Identifier: Apache-2.0

// Turns a key on, reads it, and turns it off: flip SOCKET GUEST KEY.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	patchbay "patchbay.example/go"
	pb "patchbay.example/go/v1"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: flip SOCKET GUEST KEY")
	}
	host, err := patchbay.Connect(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	defer host.Close()
	guest, key := host.Guest(os.Args[2]), os.Args[3]
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	// If this program is killed, the service drops the reference after a minute.
	inc := patchbay.Changes(pb.KeyOp_KEY_OP_INC, key)
	done, err := guest.Update(ctx, inc, patchbay.Options{TTL: time.Minute, Reason: "the example"})
	var failed *patchbay.Error
	if errors.As(err, &failed) && failed.Reason == pb.ErrorReason_ERROR_REASON_GUEST_BUSY {
		log.Fatalf("the gate %s stayed closed: %v", failed.Metadata["gate"], err)
	} else if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s is on, %d sites were patched\n", key, done.GetSummary().GetSitesPatched())
	if _, err := guest.Release(ctx, done.GetResults()[0].GetHoldId()); err != nil {
		log.Fatal(err)
	}
}
